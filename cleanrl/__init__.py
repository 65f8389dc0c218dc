"""One file per algorithm variant; each stands alone. Run them, read them, copy them."""

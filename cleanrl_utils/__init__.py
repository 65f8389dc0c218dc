"""Tools that run experiments: everything scripts share that cannot move a learning curve."""

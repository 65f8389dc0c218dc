"""What runs experiments: everything the scripts share that cannot move a learning curve."""

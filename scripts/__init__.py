"""Programs for whoever works on mesh; nothing that is installed imports them."""

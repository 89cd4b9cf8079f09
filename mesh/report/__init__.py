"""What the controller decides, in words for people."""

"""What of a trace's prompts a cache of some size would have had already."""

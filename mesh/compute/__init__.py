"""What iterations take: predictions from profiles, their correction, and how profiles are made."""

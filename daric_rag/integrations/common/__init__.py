"""What both frameworks share."""

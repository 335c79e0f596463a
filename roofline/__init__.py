"""What a decoder step must cost, and what it costs."""

"""Opening and closing lanes, and what ranks compare before they use them."""

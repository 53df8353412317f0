"""One pipeline of many modules: where stages lie, and the traffic between them."""

"""The sample tickets of `make demo` and the script that wrote them."""

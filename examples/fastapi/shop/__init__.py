"""A shop that takes orders over HTTP, and ships them when it hears of them from the stream."""

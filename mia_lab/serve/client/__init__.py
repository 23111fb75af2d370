"""A notebook's side of a server: `mia.Client(url)` is a Session whose engine runs there."""

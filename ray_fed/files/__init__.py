"""Files of data: their names, how they are opened, and the tables in them."""

"""Files of data: what their names say, how they are opened, tables in them."""

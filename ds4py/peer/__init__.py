"""What both sides of a connection do alike: who is there, is it alive, is it valid."""

"""HTTP: the application, who comes in, how much at once, replies on their way out."""

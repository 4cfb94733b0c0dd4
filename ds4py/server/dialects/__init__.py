"""What each POST route makes of a body: a checked request, its prompt, shapes of its reply."""

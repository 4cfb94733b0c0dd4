"""Requests for text from the queue to the last event, on threads of their own."""

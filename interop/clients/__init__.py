"""Agent programs against ds4py's server, whose model is scripted."""

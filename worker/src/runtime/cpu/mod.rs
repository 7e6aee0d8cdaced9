//! Runs the model on CPU cores.

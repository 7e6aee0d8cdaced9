//! Whole-cluster tests.

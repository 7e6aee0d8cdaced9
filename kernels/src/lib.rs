//! Numeric kernels behind one contract.

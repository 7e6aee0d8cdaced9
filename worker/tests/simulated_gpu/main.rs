//! Tests of the worker that compute on a simulated GPU, too: the CUDA runtime against the CPU runtime, bits under any schedule and with
//! too little of everything. A process looks for the driver once, so these are apart from the tests of machines without one.

mod gpu;
mod scarcity;
mod schedule;

//! Downloads from a stand-in of the Hub: what arrives is whole or the error is a sentence, and nothing is fetched twice.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod cache;
mod faults;
mod names;

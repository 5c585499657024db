//! The algorithm: pure decisions over plain data. Knows no runtime, clock or network.

pub mod options;
pub mod types;

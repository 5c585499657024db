//! The algorithm: pure decisions over plain data. Knows no runtime, clock or network.

pub mod admit;
pub mod ledger;
pub mod options;
pub mod residency;
pub mod types;

//! The replay lab: recorded agent traffic through a deterministic simulation, in which our own core and the
//! policies of the field route the same turns on the same machines.

pub mod cli;
pub mod figures;
pub mod hist;
pub mod policy;
pub mod settings;
pub mod sim;
pub mod trace;
pub mod workload;

//! The replay lab: recorded agent traffic through a deterministic simulation, in which our own core and the
//! policies of the field route the same turns on the same machines.

pub mod bounds;
pub mod cli;
pub mod exec;
pub mod figures;
pub mod hist;
pub mod policy;
pub mod report;
pub mod settings;
pub mod sim;
pub mod sweep;
pub mod trace;
pub mod workload;

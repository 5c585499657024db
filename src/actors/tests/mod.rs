//! The actors over simulated workers, under virtual time.

mod faults;
mod sim;
mod sync;
mod turns;

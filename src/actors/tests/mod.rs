//! The actors over simulated workers, under virtual time.

mod faults;
mod overload;
mod sim;
mod sync;
mod turns;

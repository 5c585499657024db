//! How a placed turn is executed at its workers. Knows nothing of sessions or placement.
//!
//! - [`client`]: HTTP/1.1 to workers, one connection pool per serving thread.
//! - [`builtin`]: the legs of a turn at the reference workers.
//! - [`control`]: Admit, leases and events, for the worker actors.

pub mod builtin;
pub mod client;
pub mod control;

#[cfg(test)]
pub(crate) mod fake;

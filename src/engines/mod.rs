//! How a placed turn is executed at its workers. Knows nothing of sessions or placement.
//!
//! - [`client`]: HTTP/1.1 to workers, one connection pool per serving thread.
//! - [`builtin`]: the legs of a turn at the reference workers.
//! - [`control`]: Admit, leases and events, for the worker actors.
//! - [`tls`]: rustls set-up of both, and of the gateway's listener.

pub mod builtin;
pub mod client;
pub mod control;
pub mod tls;

#[cfg(test)]
pub(crate) mod fake;

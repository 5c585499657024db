//! The algorithm: pure decisions over plain data. Knows no runtime, clock or network.
//!
//! [`turn`] drives everything: Route ([`route`], [`placement`]), Admit ([`admit`], on the books of [`ledger`])
//! and Dispatch ([`dispatch`], [`queue`], the ladder in [`cost`]) under [`options`],
//! within what the engines are [`able`] to do.

pub mod able;
pub mod admit;
pub mod breaker;
pub mod cost;
pub mod dispatch;
pub mod ledger;
pub mod options;
pub mod placement;
pub mod queue;
pub mod residency;
pub mod route;
pub mod staleness;
pub mod sync;
pub mod turn;
pub mod types;

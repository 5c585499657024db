//! D→P: a D pushes KV back to a P, which keeps it in host memory and can send it to any D again.
//!
//! - [`sender`]: what a D has to push, bounded, and [`push`] the task that pushes it, below everything else.
//! - [`receive`]: the P's own listener; [`tier`] the memory behind it.
//! - [`restore`]: the way back.
//! - [`bench`]: how fast it is against a plain TCP stream.

pub mod bench;
pub mod push;
pub mod receive;
pub mod restore;
pub mod sender;
pub mod tier;

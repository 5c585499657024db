//! What travels between a gateway and its worker nodes. `docs/wire.md` describes it; these are its types.
//!
//! - [`admit`]: `POST /admit_direct_append` (Algorithm 2 as an RPC) and the lease calls.
//! - [`plan`]: the `x-kvc-plan` header that tells a node which leg of a turn it serves.
//! - [`events`]: the (epoch, seq) stream with which a node reports what it holds.
//! - [`log`]: those changes, numbered and kept for readers that come back.
//! - [`info`]: what a node says about itself.

pub mod admit;
pub mod events;
pub mod info;
pub mod log;
pub mod plan;

/// Version of everything in this room. A node and a gateway with different versions refuse each other.
pub const PROTOCOL: u32 = 1;

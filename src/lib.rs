//! kvc-router keeps coding-agent sessions on the decode worker that already holds their KV cache.

pub mod actors;
pub mod core;
pub mod explain;
pub mod replay;
pub mod wire;

//! kvc-router keeps coding-agent sessions on the decode worker that already holds their KV cache.

pub mod actors;
pub mod cli;
pub mod core;
pub mod engines;
pub mod explain;
pub mod http;
pub mod node;
pub mod prompt;
pub mod sessions;
pub mod settings;
pub mod telemetry;
pub mod wire;

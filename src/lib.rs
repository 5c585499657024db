//! kvc-router keeps coding-agent sessions on the decode worker that already holds their KV cache.

pub mod actors;
pub mod cli;
pub mod core;
pub mod engines;
pub mod http;
pub mod settings;
pub mod telemetry;
pub mod wire;

//! kvc-router keeps coding-agent sessions on the decode worker that already holds their KV cache.
//!
//! An embedder starts a [`Router`] from [`Settings`] and mounts it in an actix-web app
//! ([`RouterHandle::configure`]), or asks for placements only ([`RouterHandle::route`], or the actix actor in
//! [`embed`]).
//!
//! The rooms, in the order they depend on each other:
//! - [`core`]: the algorithm; pure.
//! - [`wire`]: what travels between gateway and worker nodes.
//! - [`prompt`]: the canonical prompt and its block hashes.
//! - [`sessions`]: whose turn a request is.
//! - [`actors`]: session, worker and router actors; they own state and serialise decisions.
//! - [`engines`]: how a placed turn is executed at its workers.
//! - [`keeper`]: admission for engines that have none.
//! - [`http`]: the gateway.
//! - [`tokens`]: exact token counts, by the engine's own template and tokenizer.
//! - [`translate`]: Responses and Messages for engines that only speak chat completions.
//! - [`node`]: the worker side, with the builtin reference engine.
//! - [`replay`]: traces through the same core, beside the policies of the field.
//! - [`explain`]: replays recorded decisions. [`demo`]: all of it at once. [`cli`]: the commands.
#![forbid(unsafe_code)]

pub mod actors;
pub mod cli;
pub mod core;
pub mod demo;
pub mod embed;
pub mod engines;
pub mod explain;
pub mod http;
pub mod keeper;
pub mod node;
pub mod prompt;
pub mod replay;
pub mod router;
pub mod sessions;
pub mod settings;
pub mod telemetry;
pub mod tokens;
pub mod translate;
pub mod wire;

pub use router::{Router, RouterHandle, StartError};
pub use settings::Settings;

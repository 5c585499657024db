//! A node over its sockets: every mode gives the reference text, every fault leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "node/world.rs"]
mod world;

#[path = "node/apis.rs"]
mod apis;
#[path = "node/cancel.rs"]
mod cancel;
#[path = "node/chaos.rs"]
mod chaos;
#[path = "node/d2p.rs"]
mod d2p;
#[path = "node/d2p_faults.rs"]
mod d2p_faults;
#[path = "node/d2p_live.rs"]
mod d2p_live;
#[path = "node/events.rs"]
mod events;
#[path = "node/faults.rs"]
mod faults;
#[path = "node/figures.rs"]
mod figures;
#[path = "node/http.rs"]
mod http;
#[path = "node/modes.rs"]
mod modes;
#[path = "node/pressure.rs"]
mod pressure;

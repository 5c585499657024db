//! The builtin engine: a reference worker. Real KV bytes in a real pool, moved over real sockets; the model is
//! fake and the time comes from a cost model.
//!
//! - [`model`]: KV bytes and tokens as functions of what came before.
//! - [`pool`], [`state`]: the bytes, and the books that say whose they are.
//! - [`engine`], [`running`]: how a turn gets its room, and how it gives everything back.
//! - [`decode`], [`prefill`]: the two legs of a turn; `arrive`: where they meet.
//! - [`cost`], [`lane`]: what work costs, and in which order it is done.
//! - [`backup`]: what leaves for, and comes from, another worker's memory.
//! - [`kept`]: responses a later request may continue. `check`: what a body may say.
//! - [`script`]: answers that a request brings along.
//! - [`mod@reference`]: what a cold worker would have said.

mod arrive;
pub mod backup;
mod check;
pub mod cost;
pub mod decode;
pub mod engine;
pub mod kept;
pub mod lane;
pub mod model;
pub mod pool;
pub mod prefill;
pub mod reference;
pub mod request;
pub mod running;
pub mod script;
pub mod state;

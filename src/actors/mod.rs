//! Actors own state and serialise decisions.
//!
//! - [`session`]: pin, rejects and running turns of one session; drives the turn machine.
//! - [`worker`]: mirror, counts and Admit proxy of one worker; `feed` and [`rpc`] work beside its mailbox.
//! - [`router`]: score queries into a shared [`gather`], round robins, the wait queue.
//! - [`backup`]: what P workers could restore, where D workers push to; [`sync_meter`]: how well that goes.
//! - [`supervisor`]: restarts; [`slot`] and [`book`] hold what outlives an actor.
//!
//! Rules: handlers never wait for another actor, bytes never enter a mailbox, every question is answered exactly
//! once ([`reply`]). Turns are admitted by [`handle::TurnRouter::route`] before any mailbox, and each has at most
//! one question under way, so mailboxes are bounded by `max_inflight`.

pub mod api;
pub mod backup;
pub mod book;
mod feed;
pub mod fleet;
pub mod gate;
pub mod gather;
pub mod grant;
pub mod handle;
pub mod lost;
mod recording;
pub mod reply;
pub mod router;
pub mod rpc;
pub mod session;
pub mod shared;
pub mod slot;
pub mod supervisor;
pub mod sync_meter;
pub mod transport;
pub mod worker;

#[cfg(test)]
mod tests;

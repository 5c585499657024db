//! The whole gateway on real sockets, between a raw client and scripted workers.

mod access;
mod apis;
mod engines;
mod errors;
mod leaving;
mod passing;
mod rig;

//! The router as an actix actor, for services that run the transport themselves: ask for a placement with
//! [`RouteTurn`], execute it, say how it ended with [`FinishTurn`]. A thin bridge; state and supervision are
//! those of [`crate::actors`].

use actix::{Actor, Context, Handler, Message, ResponseFuture};

use crate::actors::api::{Failure, Refusal, TurnRequest, TurnResult};
use crate::actors::grant::Grant;
use crate::router::RouterHandle;

/// See the module.
pub struct RouterActor(pub RouterHandle);

impl Actor for RouterActor {
    type Context = Context<Self>;
}

/// Place a turn. A grant that is dropped cancels it.
#[derive(Debug)]
pub struct RouteTurn(pub TurnRequest);

/// How a granted turn ended.
#[derive(Debug)]
pub enum FinishTurn {
    /// It was served.
    Served(Grant, TurnResult),
    /// It failed before any byte reached the client: the answer is a new placement.
    Failed(Grant, Failure),
    /// Its client is gone, or it broke off.
    Cancelled(Grant),
}

impl Message for RouteTurn {
    type Result = Result<Grant, Refusal>;
}

impl Message for FinishTurn {
    type Result = Result<Option<Grant>, Refusal>;
}

impl Handler<RouteTurn> for RouterActor {
    type Result = ResponseFuture<Result<Grant, Refusal>>;

    fn handle(&mut self, RouteTurn(turn): RouteTurn, _: &mut Self::Context) -> Self::Result {
        let router = self.0.clone();
        Box::pin(async move { router.route(turn).await })
    }
}

impl Handler<FinishTurn> for RouterActor {
    type Result = ResponseFuture<Result<Option<Grant>, Refusal>>;

    fn handle(&mut self, end: FinishTurn, _: &mut Self::Context) -> Self::Result {
        Box::pin(async move {
            match end {
                FinishTurn::Served(grant, result) => grant.finished(result),
                FinishTurn::Failed(grant, failure) => return grant.failed(failure).await.map(Some),
                FinishTurn::Cancelled(grant) => drop(grant),
            }
            Ok(None)
        })
    }
}

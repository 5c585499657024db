//! Carrying out the turn machine's commands: questions to the other actors, the grant, what is given back.

use super::*;

impl SessionActorState {
    /// Sends a question whose answer comes back as a [`TurnEvent`].
    pub(super) fn ask(&mut self, turn: TurnKey, command: Command) {
        let Some(running) = self.turns.get_mut(&turn) else { return };
        running.asked = Some(command);
        let request = &running.request;
        match command {
            Command::Gather => {
                let (session, chain) = (request.session.clone(), request.chain.clone());
                let reply = self.reply(turn, TurnEvent::Fleet);
                self.shared.router(RouterMsg::Gather { session, chain, reply });
            }
            Command::PickPrefill => {
                let reply = self.reply(turn, TurnEvent::Prefill);
                self.shared.router(RouterMsg::PickPrefill(reply));
            }
            Command::PickFallback => {
                let reply = self.reply(turn, TurnEvent::Fallback);
                self.shared.router(RouterMsg::PickFallback(reply));
            }
            Command::Wait { work } => {
                running.queued = true;
                let session = self.myself.clone();
                self.shared.router(RouterMsg::Wait(Waiting {
                    turn,
                    session,
                    id: self.id.clone(),
                    work,
                    over: false,
                }));
            }
            Command::Admit { worker, attempt } => {
                let ask = AdmitAsk {
                    request_id: request_id(&self.shared, turn, attempt),
                    session: request.session.clone(),
                    turn: request.turn,
                    chain: request.chain.clone(),
                    input_len: request.input_len,
                    append_len: request.append_len,
                    output_reserve: running.machine.output_reserve(),
                };
                let reply = self.reply(turn, TurnEvent::Admission);
                if let Some(slot) = self.shared.worker(worker) {
                    // The session's demand counts from here on: others are being placed meanwhile.
                    self.pinned = (!self.one_shot).then(|| slot.pinned(ask.input_len));
                    slot.cast(WorkerMsg::Admit(ask, reply));
                }
            }
            Command::Release { .. } | Command::Dispatch(_) | Command::Refuse(_) => {}
        }
    }

    fn reply<T: Send + 'static>(
        &self,
        turn: TurnKey,
        event: impl FnOnce(Option<T>) -> TurnEvent + Send + 'static,
    ) -> Reply<T> {
        let myself = self.myself.clone();
        Reply::new(move |answer| {
            let _ = myself.cast(SessionMsg::Event { turn, event: event(answer) });
        })
    }

    /// Lines 10-19: counts the turn at its workers and hands it to whoever executes it.
    pub(super) fn dispatch(&mut self, turn: TurnKey, plan: Dispatch) {
        self.leave_queue(turn);
        let Some(running) = self.turns.get_mut(&turn) else { return };
        let (plan, restore_blocks) = running.restorable(plan);
        let prefill = plan.prefill.and_then(|p| self.shared.worker(p));
        // One of them may have left the fleet since it was chosen.
        let Some(decode) = self.shared.worker(plan.decode) else {
            return self.step(turn, Event::Failed(Failure::DecodeUnreachable));
        };
        if prefill.is_none() && plan.prefill.is_some() {
            return self.step(turn, Event::Failed(Failure::PrefillUnreachable));
        }
        let record = running
            .recording
            .as_ref()
            .map(|r| r.finish(turn, &running.request, &running.machine, &plan, &self.state));
        running.inflight = Some(decode.dispatched());
        let queued = if plan.rung.uses_prefill() { running.request.input_len } else { 0 };
        running.backlog = prefill.as_ref().map(|p| p.prefilling(queued));
        if plan.mode == Mode::Reseed {
            self.shared.sync.reseed(plan.rung);
        }
        let targets = match running.request.one_shot {
            true => Vec::new(),
            false => targets(&self.shared, &running.holdings, self.last_p),
        };
        self.last_p = plan.prefill.or(targets.first().map(|(p, _)| *p)).or(self.last_p);
        self.pushes = !targets.is_empty();
        let fallback_leaves = plan.mode == Mode::Fallback && !self.shared.config.options.fallback_pin;
        let plan = DispatchPlan {
            request_id: request_id(&self.shared, turn, plan.attempt),
            session: running.request.session.clone(),
            one_shot: running.request.one_shot || fallback_leaves,
            mode: plan.mode,
            rung: plan.rung,
            decode: decode.reachable_at(),
            prefill: prefill.map(|p| p.reachable_at()),
            reuse_blocks: plan.reuse_blocks,
            lease: running.lease.take().filter(|_| plan.admitted),
            restore_blocks,
            sync: targets.into_iter().map(|(_, target)| target).collect(),
            slot: None,
            replaced: running.machine.replaced(),
        };
        if let Some(reply) = running.reply.take() {
            let grant = Grant::new(plan, record, (self.myself.clone(), turn), &self.shared);
            running.granted = grant.alive();
            reply.send(Ok(grant));
        }
    }

    pub(super) fn release(&self, turn: TurnKey, worker: WorkerId, attempt: u32) {
        if !planted!(LeaseNotReleased) {
            self.shared.release(worker, request_id(&self.shared, turn, attempt));
        }
    }

    pub(super) fn release_everywhere(&self, request_id: &str) {
        for slot in self.shared.workers().iter().filter(|w| w.is_up()) {
            self.shared.release(slot.at.id, request_id.to_owned());
        }
    }

    pub(super) fn leave_queue(&mut self, turn: TurnKey) {
        let Some(running) = self.turns.get_mut(&turn) else { return };
        if std::mem::take(&mut running.queued) {
            self.shared.router(RouterMsg::Leave(turn));
        }
    }
}

fn request_id(shared: &Shared, turn: TurnKey, attempt: u32) -> String {
    format!("{:x}-{turn:x}-{attempt}", shared.config.instance)
}

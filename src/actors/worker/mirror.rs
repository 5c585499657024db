//! The mirror follows its node: what the feed brings, in order, and what that means to others.

use super::*;

impl WorkerActorState {
    pub(super) fn connected(&mut self, info: &NodeInfo) {
        self.k_d = info.k_d;
        let role = match self.args.slot.role {
            Role::Prefill => KvRole::Prefill,
            Role::Decode => KvRole::Decode,
        };
        self.wrong_role = !info.roles.contains(&role);
        if self.wrong_role {
            self.down(format!(
                "it is configured as {:?} but its node has {:?}",
                self.args.slot.role, info.roles
            ));
        }
        self.args.slot.report_kv_addr(info.kv_addr.as_deref());
        self.args.slot.report_d2p_addr(info.d2p_addr.as_deref());
        self.args.slot.report_model(&info.model);
    }

    /// Applies what the feed brought. The feed hands over a snapshot first and then every seq in order.
    pub(super) fn fed(&mut self, message: Numbered) {
        match message.event {
            NodeEvent::Snapshot(snapshot) => {
                self.restore(snapshot);
                if self.epoch != message.epoch {
                    self.epoch = message.epoch;
                    self.since = Some(Instant::now());
                }
                self.resyncs += 1;
                (self.args.on_room)();
            }
            NodeEvent::Changes(events) => {
                let mut freed = false;
                for event in events {
                    match event {
                        LedgerEvent::Held(change) => self.holds(&change),
                        LedgerEvent::Freed(_) => {}
                        LedgerEvent::LeaseEnded { .. } => freed = true,
                        LedgerEvent::BackedUp(blocks) => self.backups.extend(blocks),
                        LedgerEvent::BackupDropped(blocks) => {
                            for block in blocks {
                                self.backups.remove(&block);
                            }
                        }
                    }
                }
                if freed {
                    (self.args.on_room)();
                }
            }
            NodeEvent::Load(load) => self.load = Some(load),
        }
        self.seq = message.seq;
        if !self.up && !self.wrong_role {
            tracing::info!(worker = %self.args.slot.at.name, epoch = self.epoch, "a worker is up");
            self.up = true;
            self.error = None;
            self.args.slot.set_reachable(true);
            self.publish();
        }
    }

    /// Follows what a session holds, and tells what that means for it.
    fn holds(&mut self, change: &Change) {
        if self.args.slot.role == Role::Decode {
            let before = self.mirror.get(&change.session);
            let tail = before.and_then(|held| held.chain.get(change.keep as usize..)).unwrap_or_default();
            if !change.appended.is_empty() {
                (self.args.on_change)(Moved::Held(&change.session));
            } else if let Some(held) = before.filter(|_| !tail.is_empty()) {
                let (session, tail) = (change.session.clone(), tail.to_vec());
                let dropped = Dropped { session, committed: held.tokens, keep: change.keep, tail };
                (self.args.on_change)(Moved::Dropped(dropped));
            }
        }
        self.mirror.set(change);
    }

    fn restore(&mut self, snapshot: Snapshot) {
        let mut old = Residency::default();
        if !planted!(MirrorKept) {
            old = std::mem::take(&mut self.mirror);
        }
        for (session, tokens, appended) in snapshot.sessions {
            self.mirror.set(&Change { session, keep: 0, appended, tokens });
        }
        if self.args.slot.role == Role::Decode {
            let gone = old.sessions().filter(|(session, _)| self.mirror.get(session).is_none());
            let mut gone: Vec<_> = gone.map(|(session, held)| (session.clone(), held.clone())).collect();
            gone.sort_by(|(a, _), (b, _)| a.cmp(b));
            for (session, held) in gone {
                let dropped = Dropped { session, committed: held.tokens, keep: 0, tail: held.chain };
                (self.args.on_change)(Moved::Dropped(dropped));
            }
        }
        self.backups = snapshot.backups.into_iter().collect();
        self.load = Some(snapshot.load);
    }
}

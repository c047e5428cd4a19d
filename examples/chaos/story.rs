//! What happens: one round of faults after the other, and how the replicas get over it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::try_join_all;
use tokio::time::{Instant, sleep};

use crate::LONGEST_RECOVERY;
use crate::audit::Finding;
use crate::faults::{REPLICAS, Round, Rounds, World};
use crate::stock;

/// What happened.
#[derive(Debug, Default)]
pub struct Story {
    /// How often each fault came.
    pub faults: BTreeMap<String, usize>,
    /// From the end of each round to the next event that was applied.
    recoveries: Vec<Duration>,
    unrecovered: Vec<String>,
    unnoticed: Vec<String>,
}

impl Story {
    /// Makes faults until the time is up and all is mended.
    pub async fn happen(world: &World, rounds: Rounds, time: Duration) -> anyhow::Result<Self> {
        let mut story = Self::default();
        let begun = Instant::now();
        let now = || format!("{:>7.1} s ", begun.elapsed().as_secs_f64());
        for round in rounds.take_while(|_| begun.elapsed() < time) {
            world.watch.stumbled();
            let strikes = round.strikes.iter().map(async |strike| {
                sleep(strike.after).await;
                println!("{} {strike}", now());
                world.suffer(strike).await.with_context(|| strike.to_string())
            });
            try_join_all(strikes).await?;
            let recovery = stock::applied_after(&world.servers.database, LONGEST_RECOVERY).await;
            let stumbled = world.watch.stumbled();
            match recovery {
                Some(time) => println!("{} applied {:.1} s later; not ready: {stumbled:?}", now(), time.as_secs_f64()),
                None => println!("{} nothing applied; not ready: {stumbled:?}", now()),
            }
            story.note(&round, recovery, &stumbled);
            sleep(round.rest).await;
        }
        Ok(story)
    }

    fn note(&mut self, round: &Round, recovery: Option<Duration>, stumbled: &[usize]) {
        let names: Vec<_> = round.strikes.iter().map(|strike| strike.fault.to_string()).collect();
        let names_together = names.join(", ");
        match recovery {
            Some(recovery) => self.recoveries.push(recovery),
            None => self.unrecovered.push(format!("no event within {LONGEST_RECOVERY:?} after: {names_together}")),
        }
        if round.strikes.iter().any(|strike| strike.fault.is_felt_by_all()) && stumbled.len() < REPLICAS {
            self.unnoticed.push(format!("only {stumbled:?} were not ready during: {names_together}"));
        }
        for name in names {
            *self.faults.entry(name).or_default() += 1;
        }
    }

    /// What it says of the service.
    pub fn findings(mut self) -> [Finding; 2] {
        self.recoveries.sort_unstable();
        let seconds = |recovery: Option<&Duration>| recovery.map_or(f64::NAN, Duration::as_secs_f64);
        let (median, longest) = (self.recoveries.get(self.recoveries.len() / 2), self.recoveries.last());
        let recovery = format!(
            "next event after a round of faults: median {:.1} s, longest {:.1} s",
            seconds(median),
            seconds(longest)
        );
        let readiness = format!("followed {} rounds of faults", self.recoveries.len());
        [Finding::new("recovery", recovery, self.unrecovered), Finding::new("readiness", readiness, self.unnoticed)]
    }
}

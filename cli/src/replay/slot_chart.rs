//! Text of `inflight replay --slots`: a chart of a worker's slots, one row each, over its iterations, one column each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use inflight_worker::Preemption;

use super::batch::{Changes, Joined, Number};

/// Maximum iterations of a chart.
pub const ITERATIONS_MAX: u64 = 10_000;
/// Maximum requests that the legend lists.
const LEGEND_MAX: usize = 200;
/// Distance of the iteration numbers above the columns.
const RULER_STEP: usize = 10;
/// Columns that a chart has at least, however narrow the terminal.
const COLUMNS_MIN: usize = 10;

/// A slot in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Prefill(Number),
    Decode(Number),
    /// Taken, with nothing computed.
    Held,
    /// Lost by preemption before the iteration, and not taken by another sequence.
    Lost(Preemption),
}

impl Cell {
    fn number(self) -> Option<Number> {
        match self {
            Self::Prefill(number) | Self::Decode(number) => Some(number),
            Self::Held | Self::Lost(_) => None,
        }
    }
}

/// An iteration.
#[derive(Debug)]
struct Column {
    iteration: u64,
    cells: BTreeMap<u32, Cell>,
    waiting: usize,
    swapped: usize,
}

/// Legend entry of a sequence.
#[derive(Debug)]
struct Life {
    joined: Joined,
    first: Option<u64>,
    last: u64,
    end: Option<&'static str>,
}

/// Chart of the iterations from `from` to `to`; built from all plans in order, and drawn at the end.
#[derive(Debug)]
pub struct SlotChart {
    from: u64,
    to: u64,
    width: usize,
    columns: Vec<Column>,
    /// Slots lost since the last iteration: a plan that waits for copies computes nothing.
    lost: BTreeMap<u32, Cell>,
    lives: BTreeMap<Number, Life>,
    /// Number of the last iteration of the recording.
    last: u64,
}

impl SlotChart {
    /// Creates an empty chart of at most `width` characters a line. Without `to`, it ends where the first line is full.
    pub fn new(from: u64, to: Option<u64>, width: usize) -> Self {
        let from = from.max(1);
        let one_line = from.saturating_add(Self::columns_max(width) as u64 - 1);
        let to = to.unwrap_or(one_line).min(from.saturating_add(ITERATIONS_MAX - 1));
        Self { from, to, width, columns: Vec::new(), lost: BTreeMap::new(), lives: BTreeMap::new(), last: 0 }
    }

    /// Columns that fit beside the names of the rows.
    fn columns_max(width: usize) -> usize {
        width.saturating_sub(NAME_WIDTH).max(COLUMNS_MIN)
    }

    /// Adds a plan.
    pub fn add(&mut self, changes: &Changes) {
        for joined in &changes.joined {
            let life = Life { joined: joined.clone(), first: None, last: 0, end: None };
            self.lives.insert(joined.number, life);
        }
        self.end(&changes.ended);
        for victim in &changes.preempted {
            self.lost.extend(victim.slot.map(|slot| (slot, Cell::Lost(victim.kind))));
        }
        let Some(iteration) = changes.iteration else { return };
        let mut cells = std::mem::take(&mut self.lost);
        self.last = iteration;
        for work in &changes.work {
            if let Some(life) = self.lives.get_mut(&work.number) {
                life.first.get_or_insert(iteration);
                life.last = iteration;
            }
        }
        if !(self.from..=self.to).contains(&iteration) {
            return;
        }
        cells.extend(changes.held.iter().map(|(slot, _)| (*slot, Cell::Held)));
        for work in &changes.work {
            let cell = if work.prefill { Cell::Prefill(work.number) } else { Cell::Decode(work.number) };
            cells.insert(work.slot, cell);
        }
        let (waiting, swapped) = (changes.waiting, changes.swapped);
        self.columns.push(Column { iteration, cells, waiting, swapped });
    }

    /// Adds the sequences that ended. Those outside of the chart are forgotten.
    pub fn end(&mut self, ended: &[(Number, &'static str)]) {
        for (number, reason) in ended {
            let Some(life) = self.lives.get_mut(number) else { continue };
            life.end = Some(reason);
            let runs = life.first.is_some_and(|first| first <= self.to && life.last >= self.from);
            if !runs {
                self.lives.remove(number);
            }
        }
    }

    /// Draws the chart with its legend.
    pub fn draw(&self) -> String {
        let (Some(first), Some(last)) = (self.columns.first(), self.columns.last()) else {
            return format!(
                "no iterations from {} to {}; the recording has {}\n",
                self.from, self.to, self.last
            );
        };
        let letters = letters(&self.columns);
        let mut text = format!("iterations {} to {} of {}", first.iteration, last.iteration, self.last);
        if last.iteration < self.last {
            let _ = write!(text, "; --from {} continues", last.iteration + 1);
        }
        text.push('\n');
        for panel in self.columns.chunks(Self::columns_max(self.width)) {
            text.push('\n');
            draw_panel(panel, &letters, &mut text);
        }
        self.draw_sum(&mut text);
        text.push_str(KEY);
        self.draw_legend(&letters, &mut text);
        text
    }

    /// Adds the share of the slots that computed something, over the iterations shown.
    fn draw_sum(&self, text: &mut String) {
        let slots: BTreeSet<u32> =
            self.columns.iter().flat_map(|column| column.cells.keys().copied()).collect();
        let all = slots.len() * self.columns.len();
        let computes = |cell: &&Cell| cell.number().is_some();
        let computed: usize =
            self.columns.iter().map(|column| column.cells.values().filter(computes).count()).sum();
        if all > 0 {
            let share = 100.0 * computed as f64 / all as f64;
            let _ = writeln!(text, "\ncomputed: {computed} of {all} slot iterations ({share:.1} %)");
        }
    }

    fn draw_legend(&self, letters: &BTreeMap<Number, char>, text: &mut String) {
        for (number, letter) in letters.iter().take(LEGEND_MAX) {
            let Some(life) = self.lives.get(number) else { continue };
            let Joined { tenant, known_tokens, max_tokens, .. } = &life.joined;
            let end = life.end.map_or_else(String::new, |reason| format!(", ended: {reason}"));
            let _ = writeln!(
                text,
                "  {letter} s{number}: tenant {tenant:?}, {known_tokens} tokens, at most {max_tokens} more; iterations \
                 {} to {}{end}",
                life.first.unwrap_or_default(),
                life.last
            );
        }
        if letters.len() > LEGEND_MAX {
            let _ = writeln!(text, "  … and {} more", letters.len() - LEGEND_MAX);
        }
    }
}

/// Width of the names of the rows.
const NAME_WIDTH: usize = 10;
/// Meaning of the cells.
const KEY: &str = "
upper case: prefill; lower case: decode; -: taken, nothing computed; .: free;
!: lost by preemption, to be computed again; ~: swapped out; +: ten or more
";

fn draw_panel(panel: &[Column], letters: &BTreeMap<Number, char>, text: &mut String) {
    let mut ruler = String::new();
    for (at, column) in panel.iter().enumerate().step_by(RULER_STEP) {
        // A number that is longer than the distance of two is left out.
        let number = column.iteration.to_string();
        if ruler.len() <= at && at + number.len() <= panel.len().max(number.len()) {
            let _ = write!(ruler, "{:at$}{number}", "", at = at - ruler.len());
        }
    }
    let _ = writeln!(text, "{:NAME_WIDTH$}{ruler}", "");
    let slots: BTreeSet<u32> = panel.iter().flat_map(|column| column.cells.keys().copied()).collect();
    for slot in slots {
        let symbol = |column: &Column| match column.cells.get(&slot) {
            None => '.',
            Some(Cell::Held) => '-',
            Some(Cell::Lost(Preemption::Recompute)) => '!',
            Some(Cell::Lost(Preemption::Swap)) => '~',
            Some(Cell::Prefill(number)) => letters.get(number).copied().unwrap_or('?'),
            Some(Cell::Decode(number)) => letters.get(number).map_or('?', char::to_ascii_lowercase),
        };
        let row: String = panel.iter().map(symbol).collect();
        let _ = writeln!(text, "slot {slot:>3}  {row}");
    }
    let digit = |count: usize| match count {
        0 => '.',
        1..=9 => char::from(b'0' + count as u8),
        _ => '+',
    };
    type Count = fn(&Column) -> usize;
    let counts: [(&str, Count); 2] =
        [("waiting", |column| column.waiting), ("swapped", |column| column.swapped)];
    for (name, count) in counts {
        if panel.iter().any(|column| count(column) > 0) {
            let row: String = panel.iter().map(|column| digit(count(column))).collect();
            let _ = writeln!(text, "{name:NAME_WIDTH$}{row}");
        }
    }
}

/// Gives each sequence of the columns a letter: one that no other sequence has at the same time, as long as there are
/// enough, and never the one that had the slot before.
fn letters(columns: &[Column]) -> BTreeMap<Number, char> {
    let mut last_column: BTreeMap<Number, usize> = BTreeMap::new();
    for (at, column) in columns.iter().enumerate() {
        last_column.extend(column.cells.values().filter_map(|cell| Some((cell.number()?, at))));
    }
    let mut letters: BTreeMap<Number, char> = BTreeMap::new();
    // Letter of the last sequence in each slot, and until which column a letter is in use.
    let mut of_slot: BTreeMap<u32, char> = BTreeMap::new();
    let mut in_use: BTreeMap<char, usize> = BTreeMap::new();
    let mut next = 0u8;
    for (at, column) in columns.iter().enumerate() {
        let taken = column.cells.iter().filter_map(|(slot, cell)| Some((cell.number()?, slot)));
        for (number, slot) in taken.collect::<BTreeMap<Number, &u32>>() {
            let letter = letters.get(&number).copied().unwrap_or_else(|| {
                let candidate = |step: u8| char::from(b'A' + (next + step) % 26);
                let other = |letter: &char| of_slot.get(slot) != Some(letter);
                let free = |letter: &char| in_use.get(letter).is_none_or(|until| *until < at);
                let mut candidates = (0..26).map(candidate).filter(other);
                let chosen = candidates.clone().find(free).or_else(|| candidates.next()).unwrap_or('A');
                next = (chosen as u8 - b'A' + 1) % 26;
                let until = last_column.get(&number).copied().unwrap_or(at);
                in_use.entry(chosen).and_modify(|other| *other = until.max(*other)).or_insert(until);
                letters.insert(number, chosen);
                chosen
            });
            of_slot.insert(*slot, letter);
        }
    }
    letters
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use inflight_contract::{TokenCost, VirtualTokenCounters, Weight};
    use inflight_worker_core::policy::PolicyKind;
    use inflight_worker_core::{
        CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits, ScoredRange, Time,
        TokenVerdict,
    };

    use super::*;
    use crate::replay::batch::BatchTracker;
    use crate::replay::plan_lines;

    /// Records a scheduler with `slots` slots and `blocks` blocks of 4 tokens: sequences of `(tenant, prompt, output)`
    /// tokens, two at the start and one more before each further plan.
    fn recording(
        policy: PolicyKind,
        slots: u32,
        blocks: u32,
        host: u32,
        lengths: &[(&str, u32, u32)],
    ) -> Vec<u8> {
        let limits = SchedulerLimits {
            host_blocks: host,
            watermark_blocks: 0,
            ..SchedulerLimits::new(4, blocks, slots, 8)
        };
        // Copies cost next to nothing, so swaps are preferred wherever the host has room.
        let prior = CostPrior::default().with_copies(0.0, 1e-9);
        let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
        let mut scheduler = Scheduler::new(limits, policy.build(), CostModel::new(prior), tenants).unwrap();
        scheduler.record(policy, &prior);
        let mut arrivals = lengths.iter();
        let mut step = 0u64;
        let took = Duration::from_millis(1);
        while !arrivals.as_slice().is_empty() || !scheduler.is_idle() {
            let now = Time::from_nanos(step * 1_000_000);
            for (tenant, known_tokens, max_tokens) in arrivals.by_ref().take(if step == 0 { 2 } else { 1 }) {
                let new = NewSequence {
                    known_tokens: *known_tokens,
                    max_tokens: *max_tokens,
                    priority: 0,
                    deadline: None,
                    tenant,
                    weight: Weight::default(),
                    hashes: &[],
                    group: None,
                    virtual_start_time: None,
                    charged_tokens: 0,
                    scored: ScoredRange::default(),
                };
                scheduler.submit(new, now).unwrap();
            }
            let plan = scheduler.plan(now);
            let (number, runs, transfers) = (plan.number, !plan.chunks.is_empty(), plan.transfers.clone());
            let samples = plan.chunks.iter().filter(|chunk| chunk.samples).count();
            for transfer in transfers {
                scheduler.transfer_done(transfer.id, true, took, now).unwrap();
            }
            if runs {
                let verdicts = vec![TokenVerdict::CONTINUE; samples];
                scheduler
                    .commit(number, IterationOutcome { verdicts: &verdicts, accepted: &[], took })
                    .unwrap();
            }
            scheduler.drain_ended().for_each(drop);
            scheduler.drain_freed_slots().for_each(drop);
            step += 1;
            assert!(step < 1_000, "the schedule does not end");
        }
        scheduler.take_log()
    }

    /// Replays a recording into a chart; also returns the lines of its plans.
    fn replay(bytes: &[u8], mut chart: SlotChart) -> (String, String) {
        let (mut tracker, mut lines) = (BatchTracker::default(), String::new());
        let replayed = inflight_worker::replay(bytes, |event| {
            if let Some(changes) = tracker.observe(&event) {
                chart.add(&changes);
                let number = changes.iteration.map_or_else(|| "-".to_owned(), |number| number.to_string());
                lines.push_str(&format!("#{number}\n{}", plan_lines::changes(&changes)));
            }
        });
        replayed.unwrap();
        chart.end(&tracker.into_ended());
        (chart.draw(), lines)
    }

    const LENGTHS: [(&str, u32, u32); 5] = [("a", 5, 3), ("a", 11, 6), ("b", 3, 2), ("b", 9, 4), ("b", 2, 7)];

    #[test]
    fn continuous_batching_fills_each_slot_as_soon_as_it_is_free() {
        let bytes = recording("fcfs".parse().unwrap(), 2, 32, 0, &LENGTHS);
        let expected = "\
iterations 1 to 15 of 15

          1         11
slot   0  AaaCcDDddd.....
slot   1  BBBbbbbbEeeeeee
waiting   .1222111.......

computed: 25 of 30 slot iterations (83.3 %)

upper case: prefill; lower case: decode; -: taken, nothing computed; .: free;
!: lost by preemption, to be computed again; ~: swapped out; +: ten or more
  A s1: tenant \"a\", 5 tokens, at most 3 more; iterations 1 to 3, ended: length
  B s2: tenant \"a\", 11 tokens, at most 6 more; iterations 1 to 8, ended: length
  C s3: tenant \"b\", 3 tokens, at most 2 more; iterations 4 to 5, ended: length
  D s4: tenant \"b\", 9 tokens, at most 4 more; iterations 6 to 10, ended: length
  E s5: tenant \"b\", 2 tokens, at most 7 more; iterations 9 to 15, ended: length
";
        assert_eq!(replay(&bytes, SlotChart::new(1, None, 80)).0, expected);
    }

    #[test]
    fn static_batching_leaves_slots_free_until_the_last_of_the_batch_has_ended() {
        let bytes = recording("static".parse().unwrap(), 2, 32, 0, &LENGTHS);
        let expected = "\
iterations 1 to 20 of 20

          1         11
slot   0  Aaa.....DDdddEeeeeee
slot   1  BBBbbbbbCc..........
waiting   .123333311111.......

computed: 25 of 40 slot iterations (62.5 %)

upper case: prefill; lower case: decode; -: taken, nothing computed; .: free;
!: lost by preemption, to be computed again; ~: swapped out; +: ten or more
  A s1: tenant \"a\", 5 tokens, at most 3 more; iterations 1 to 3, ended: length
  B s2: tenant \"a\", 11 tokens, at most 6 more; iterations 1 to 8, ended: length
  C s3: tenant \"b\", 3 tokens, at most 2 more; iterations 9 to 10, ended: length
  D s4: tenant \"b\", 9 tokens, at most 4 more; iterations 9 to 13, ended: length
  E s5: tenant \"b\", 2 tokens, at most 7 more; iterations 14 to 20, ended: length
";
        assert_eq!(replay(&bytes, SlotChart::new(1, None, 80)).0, expected);
    }

    #[test]
    fn preemptions_are_drawn_and_named() {
        let lengths = [("a", 7, 12), ("a", 6, 12), ("a", 2, 4)];
        let bytes = recording("fcfs".parse().unwrap(), 3, 6, 4, &lengths);
        let (chart, lines) = replay(&bytes, SlotChart::new(1, None, 80));
        let expected = "\
iterations 1 to 22 of 22

          1         11        21
slot   0  AAaaaaaaaaaaabbbbbCccc
slot   1  Bbbbbbb~..............
waiting   .11111111111111111....
swapped   .......111111.........

computed: 29 of 44 slot iterations (65.9 %)

upper case: prefill; lower case: decode; -: taken, nothing computed; .: free;
!: lost by preemption, to be computed again; ~: swapped out; +: ten or more
  A s1: tenant \"a\", 7 tokens, at most 12 more; iterations 1 to 13, ended: length
  B s2: tenant \"a\", 6 tokens, at most 12 more; iterations 1 to 18, ended: length
  C s3: tenant \"a\", 2 tokens, at most 4 more; iterations 19 to 22, ended: length
";
        assert_eq!(chart, expected);
        let expected = "\
#1
                joined     s1 (tenant \"a\", 7 tokens, at most 12 more), s2 (tenant \"a\", 6 tokens, at most 12 more)
                admitted   s1 (slot 0, tokens 0-1), s2 (slot 1, tokens 0-5)
#2
                joined     s3 (tenant \"a\", 2 tokens, at most 4 more)
                continued  s2 s1 (tokens 2-6)
#3
                continued  s1 s2
#4
                continued  s1 s2
#5
                continued  s1 s2
#6
                continued  s1 s2
#7
                continued  s1 s2
#-
                preempted  s2 (swap, for s1)
                held       s1
#8
                continued  s1
#9
                continued  s1
#10
                continued  s1
#11
                continued  s1
#12
                continued  s1
#13
                continued  s1
#-
                ended      s1 (length)
                resumed    s2 (slot 0, swapped in, no tokens yet)
#14
                continued  s2
#15
                continued  s2
#16
                continued  s2
#17
                continued  s2
#18
                continued  s2
#19
                ended      s2 (length)
                admitted   s3 (slot 0, tokens 0-1)
#20
                continued  s3
#21
                continued  s3
#22
                continued  s3
";
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_chart_is_as_wide_and_as_long_as_asked_for() {
        let bytes = recording("fcfs".parse().unwrap(), 2, 32, 0, &LENGTHS);
        let expected = "\
iterations 3 to 15 of 15

          3
slot   0  aCcDDddd..
slot   1  BbbbbbEeee
waiting   222111....

          13
slot   1  eee

computed: 21 of 26 slot iterations (80.8 %)

upper case: prefill; lower case: decode; -: taken, nothing computed; .: free;
!: lost by preemption, to be computed again; ~: swapped out; +: ten or more
  A s1: tenant \"a\", 5 tokens, at most 3 more; iterations 1 to 3, ended: length
  B s2: tenant \"a\", 11 tokens, at most 6 more; iterations 1 to 8, ended: length
  C s3: tenant \"b\", 3 tokens, at most 2 more; iterations 4 to 5, ended: length
  D s4: tenant \"b\", 9 tokens, at most 4 more; iterations 6 to 10, ended: length
  E s5: tenant \"b\", 2 tokens, at most 7 more; iterations 9 to 15, ended: length
";
        assert_eq!(replay(&bytes, SlotChart::new(3, Some(15), 20)).0, expected);
        let first = replay(&bytes, SlotChart::new(1, None, 20)).0;
        assert!(first.starts_with("iterations 1 to 10 of "), "{first}");
        assert!(first.contains("; --from 11 continues\n"), "{first}");
        let beyond = replay(&bytes, SlotChart::new(1_000, None, 80)).0;
        assert!(beyond.starts_with("no iterations from 1000 to 1069; the recording has "), "{beyond}");
        for (from, to, width) in
            [(0, None, 0), (5, Some(5), 1), (u64::MAX, None, 80), (u64::MAX, Some(u64::MAX), 0)]
        {
            replay(&bytes, SlotChart::new(from, to, width));
        }
    }

    #[test]
    fn each_request_has_a_letter_of_its_own_while_there_are_enough() {
        let column = |iteration: u64, numbers: &[(u32, Number)]| {
            let cells = numbers.iter().map(|(slot, number)| (*slot, Cell::Decode(*number))).collect();
            Column { iteration, cells, waiting: 0, swapped: 0 }
        };
        // 60 sequences one after the other in a slot, beside one that stays.
        let columns: Vec<Column> = (1..=60).map(|at| column(at, &[(0, 100), (1, at)])).collect();
        let given = letters(&columns);
        assert!((1..=60).all(|number| given[&number] != given[&100]), "{given:?}");
        assert!((1..60).all(|number| given[&number] != given[&(number + 1)]), "{given:?}");
        // 60 at the same time: letters repeat.
        let crowd: Vec<(u32, Number)> = (1..=60).map(|at| (at as u32, at)).collect();
        assert_eq!(letters(&[column(1, &crowd)]).len(), 60);
    }
}

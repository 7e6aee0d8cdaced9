//! Tests of the router's core: the dispatcher under chaos, the fair queue, fairness over routers, placement policies, the queue of
//! tokenizing work.

mod dispatcher;
mod fair_queue;
mod fairness;
mod placement;
mod tokenize_queue;

"""Integrations: training loops that are somebody else's, with every step in a session's step.

What runs a loop of its own needs none: with Accelerate, as with torch alone, the step goes around
the forward and the backward. Nothing here imports a framework before it is used.

Hugging Face::

    from offload.integrations.transformers import run_in_steps

    trainer = Trainer(model, args, train_dataset=dataset)
    with offload.Session() as session, run_in_steps(trainer, session):
        trainer.train()

Lightning::

    from offload.integrations.lightning import step_callback

    with offload.Session() as session:
        trainer = Trainer(max_epochs=1, callbacks=[step_callback(session)])
        trainer.fit(module, loader)

Accelerate::

    with offload.Session() as session:
        for batch in loader:
            with accelerator.accumulate(model):
                with session.step():
                    accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
"""

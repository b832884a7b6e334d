"""Write a drafter: anything that proposes tokens will do, and the text stays the target's own.

This one remembers, for every token, which token last came after it, and follows that chain. Its guesses are choices and
not draws, so their law is Delta.
"""

import torch

from specdiff import Delta, Proposal, SpecDiff, load_target


class Bigrams:
    """The drafter: settings only. All state of a request lives in its session."""

    block_size = 4
    taps = ()  # it reads no states of the target

    def start(self, request):
        return BigramSession(request, self.block_size)


class BigramSession:
    def __init__(self, request, block_size):
        self.request, self.block_size = request, block_size
        self.rows = [{"next": {}, "last": None} for _ in range(request.batch_size)]

    def propose(self, anchor, limits, noise):
        tokens = torch.zeros(len(self.rows), self.block_size, dtype=torch.long)
        lengths = []
        for r, row in enumerate(self.rows):
            token, length = int(anchor[r]), 0
            if row["last"] is not None:
                row["next"][row["last"]] = token
            while length < min(self.block_size, int(limits[r])) and token in row["next"]:
                token = row["next"][token]
                tokens[r, length] = token
                length += 1
            lengths.append(length)
        device = anchor.device
        return Proposal(tokens.to(device), torch.tensor(lengths, device=device), Delta())

    def commit(self, tokens, counts, taps):
        for row, ids, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=True):
            for token in ids[:count]:
                if row["last"] is not None:
                    row["next"][row["last"]] = token
                row["last"] = token

    def select(self, rows):
        self.rows = [self.rows[r] for r in rows.tolist()]

    def rollback(self, lengths):
        """Nothing to forget: an old guess can only be a bad guess."""

    def close(self):
        self.rows = []


ar, tokenizer = load_target()
messages = [{"role": "user", "content": "Repeat five times: the cat sat on the mat."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

out = SpecDiff(ar, Bigrams()).generate(**inputs, max_new_tokens=64, do_sample=False, return_dict_in_generate=True)
plain = ar.generate(**inputs, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("tau", round(out.stats.tau, 2), "- same tokens as ar.generate:", out.sequences.tolist() == plain.tolist())

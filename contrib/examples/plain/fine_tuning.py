"""Fine-tune a classifier of texts by Hugging Face's Trainer.

python fine_tuning.py MODEL TABLE [EPOCHS]    MODEL: name or folder; TABLE: lines of "label<TAB>text"
"""

import sys
from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

MODEL, TABLE = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(MODEL)
rows = [line.split("\t", 1) for line in Path(TABLE).read_text().splitlines()]
data = [{"label": int(label), **tokenizer(text, truncation=True)} for label, text in rows]
args = TrainingArguments(
    output_dir="trainer",
    num_train_epochs=float(sys.argv[3]) if sys.argv[3:] else 3,
    per_device_train_batch_size=16,
    learning_rate=5e-5 if not sys.argv[4:] else float(sys.argv[4]),
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(MODEL),
    args=args,
    train_dataset=data[len(data) // 5 :],
    eval_dataset=data[: len(data) // 5],
    processing_class=tokenizer,
)
trainer.train()
print(trainer.evaluate())

package mvcc

// A key with a deadline or a lease has records of its own, see queueDeadlines and attachLeases. A commit writes up to two of them for each operation
// that sets a deadline: the entry of the queue, and the deletion of the one before.

// deadlineRecordsMax is how many records of the expiry queue an operation writes that sets a deadline.
const deadlineRecordsMax = 2

// ownedRecordsMax is how many records operation i of the batch, in the order of Key, writes with it.
func (w *Write) ownedRecordsMax(i int) (n int) {
	f, _ := w.Batch.Metadata(i) // its error ends the commit later
	if f.ExpiresAt != 0 {
		n = deadlineRecordsMax
	}
	if f.Lease != 0 {
		n++ // the attachment
	}
	return n
}

// countedOperations is how many operations w counts as: what sets a deadline or a lease counts with its records, which take as much memory and time as
// other operations. What takes a record away is one operation: most have none to take away. A single operation is one, whatever it sets; and a write
// that has more than most is not counted further.
func (w *Write) countedOperations(most int) int {
	n := w.Batch.Operations()
	if n > most || n <= 1 {
		return n
	}
	for i := range w.ops {
		if w.ops[i].ExpiresAt != 0 {
			n += deadlineRecordsMax
		}
	}
	for i := 0; w.ops == nil && w.Batch.WithMetadata() > 0 && i < w.Batch.Count(); i++ {
		n += w.ownedRecordsMax(i)
	}
	return n
}

# A small C program with mistakes, and one without.
cat > stack.h <<'C'
struct stack { int *items; unsigned size, room; };
void push(struct stack *s, int item);
int pop(struct stack *s);
C
cat > stack.c <<'C'
#include <stdlib.h>
#include "stack.h"
void push(struct stack *s, int item) {
    int spare;
    if (s->size == s->room) {
        s->room = s->room ? s->room * 2 : 8;
        s->items = realloc(s->items, s->room * sizeof *s->items);
    }
    s->items[s->size++] = item;
}
int pop(struct stack *s) {
    for (int i = 0; i < s->size; i++) { }
    if (s->size = 0) return -1;
    return s->items[--s->size];
}
C
cat > main.c <<'C'
#include <stdio.h>
#include "stack.h"
static int twice(int n) { return 2 * n; }
int main(void) {
    struct stack s = {0};
    push(&s, 1, 2);
    printf("%s\n", pop(&s));
    missing_function(3);
    return s.length;
}
C
cat > Makefile <<'M'
CFLAGS = -Wall -Wextra -O1
app: main.o stack.o
	$(CC) $(CFLAGS) -o $@ $^
%.o: %.c stack.h
	$(CC) $(CFLAGS) -c -o $@ $<
M

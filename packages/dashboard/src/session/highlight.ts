/** An editor for code. It and its languages are fetched when they are first needed. */
import { defaultKeymap, history, historyKeymap, indentWithTab } from '@codemirror/commands';
import {
  bracketMatching, HighlightStyle, indentOnInput, indentUnit, LanguageSupport, StreamLanguage,
  syntaxHighlighting, type StreamParser,
} from '@codemirror/language';
import { highlightSelectionMatches, search, searchKeymap } from '@codemirror/search';
import { Compartment, EditorState, Prec, type Extension } from '@codemirror/state';
import {
  drawSelection, EditorView, highlightActiveLine, highlightSpecialChars, keymap, lineNumbers, placeholder,
} from '@codemirror/view';
import { tags } from '@lezer/highlight';
import { styleNonce } from './nonce.js';

export interface EditorOptions {
  parent: HTMLElement;
  text: string;
  label: string;
  /** A file name: its ending chooses the language. */
  name: string;
  hint?: string;
  isReadOnly?: boolean;
  hasLineNumbers?: boolean;
  onChange?: (text: string) => void;
  /** Shift+Enter; Ctrl+Enter. Editors that do not run anything have none. */
  onRun?: (stays: boolean) => void;
  onSave?: () => void;
  /** Esc: the focus leaves, as Tab would stay in the editor. */
  onEscape?: () => void;
  onArrowOut?: (direction: -1 | 1) => void;
}

const style = HighlightStyle.define([
  { tag: [tags.keyword, tags.modifier, tags.operatorKeyword, tags.definitionKeyword], class: 'tok-keyword' },
  { tag: [tags.string, tags.special(tags.string), tags.regexp], class: 'tok-string' },
  { tag: [tags.comment, tags.lineComment, tags.blockComment], class: 'tok-comment' },
  { tag: [tags.number, tags.bool, tags.null, tags.atom], class: 'tok-number' },
  { tag: [tags.function(tags.variableName), tags.function(tags.propertyName)], class: 'tok-function' },
  { tag: [tags.definition(tags.variableName), tags.propertyName, tags.attributeName], class: 'tok-property' },
  { tag: [tags.className, tags.typeName, tags.tagName, tags.namespace], class: 'tok-type' },
  { tag: [tags.heading, tags.strong], class: 'tok-heading' },
  { tag: tags.emphasis, class: 'tok-emphasis' },
  { tag: [tags.link, tags.url], class: 'tok-link' },
  { tag: tags.invalid, class: 'tok-invalid' },
]);

const look = EditorView.theme({
  '&': { fontSize: '13px', backgroundColor: 'transparent', color: 'var(--text)' },
  '&.cm-focused': { outline: 'none' },
  '.cm-scroller': { fontFamily: 'var(--mono)', lineHeight: '1.5' },
  '.cm-content': { caretColor: 'var(--text)', padding: '8px 0' },
  '.cm-line': { padding: '0 12px' },
  '.cm-cursor': { borderLeftColor: 'var(--text)' },
  '.cm-gutters': { backgroundColor: 'transparent', color: 'var(--quiet)', border: 'none' },
  '.cm-activeLine': { backgroundColor: 'transparent' },
  '&.cm-focused .cm-activeLine': { backgroundColor: 'var(--session-line)' },
  '.cm-activeLineGutter': { backgroundColor: 'transparent' },
  '&.cm-focused .cm-selectionBackground, .cm-selectionBackground, &.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground':
    { backgroundColor: 'var(--session-selection)' },
  '.cm-matchingBracket, &.cm-focused .cm-matchingBracket': { backgroundColor: 'var(--session-selection)', color: 'inherit' },
  '.cm-panels': { backgroundColor: 'var(--surface)', color: 'var(--text)', borderColor: 'var(--line)' },
  '.cm-textfield, .cm-button': { backgroundImage: 'none', backgroundColor: 'var(--surface)', color: 'var(--text)', borderColor: 'var(--line)' },
  '.cm-specialChar': { color: 'var(--bad)' },
  '.cm-placeholder': { color: 'var(--quiet)' },
});

export class Editor {
  readonly #view: EditorView;
  readonly #language = new Compartment();

  constructor(options: EditorOptions) {
    const { parent, text, label, name, onChange, onRun, onSave, onEscape, onArrowOut } = options;
    const run = (stays: boolean) => () => (onRun?.(stays), true);
    const bindings = [
      ...(onRun ? [{ key: 'Shift-Enter', run: run(false) }, { key: 'Mod-Enter', run: run(true) }] : []),
      ...(onSave ? [{ key: 'Mod-s', preventDefault: true, run: () => (onSave(), true) }] : []),
      ...(onEscape ? [{ key: 'Escape', run: () => (onEscape(), true) }] : []),
      ...(onArrowOut ? [arrow('ArrowUp', -1, onArrowOut), arrow('ArrowDown', 1, onArrowOut)] : []),
    ];
    const extensions: Extension[] = [
      EditorView.cspNonce.of(styleNonce()),
      Prec.highest(keymap.of(bindings)),
      keymap.of([...defaultKeymap, ...historyKeymap, ...searchKeymap, indentWithTab]),
      history(),
      drawSelection(),
      highlightSpecialChars(),
      highlightActiveLine(),
      highlightSelectionMatches(),
      search({ top: true }),
      bracketMatching(),
      indentOnInput(),
      indentUnit.of('    '),
      // A carriage return stays where it is, instead of becoming a line end.
      EditorState.lineSeparator.of('\n'),
      EditorView.lineWrapping,
      look,
      syntaxHighlighting(style),
      this.#language.of([]),
      EditorView.contentAttributes.of({ 'aria-label': label }),
      EditorView.updateListener.of((update) => {
        if (update.docChanged) onChange?.(update.state.doc.toString());
      }),
    ];
    if (options.hasLineNumbers) extensions.push(lineNumbers());
    if (options.hint) extensions.push(placeholder(options.hint));
    if (options.isReadOnly) extensions.push(EditorState.readOnly.of(true));
    this.#view = new EditorView({ parent, state: EditorState.create({ doc: text, extensions }) });
    void languageOf(name).then((language) => {
      if (language) this.#view.dispatch({ effects: this.#language.reconfigure(language) });
    }, () => {}); // without colours it can be read, too
  }

  get text(): string {
    return this.#view.state.doc.toString();
  }

  focus(): void {
    this.#view.focus();
  }

  /** Show a line, counted from 1, and put the cursor there. */
  goTo(line: number): void {
    const { doc } = this.#view.state;
    const { from } = doc.line(Math.max(1, Math.min(line, doc.lines)));
    this.#view.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: 'center' }) });
    this.#view.focus();
  }

  destroy(): void {
    this.#view.destroy();
  }
}

/** An arrow key at the edge of the text goes to the editor above or below. */
function arrow(keyName: string, direction: -1 | 1, out: (direction: -1 | 1) => void) {
  return {
    key: keyName,
    run: ({ state }: EditorView) => {
      const { main } = state.selection;
      const line = state.doc.lineAt(main.head).number;
      if (!main.empty || line !== (direction < 0 ? 1 : state.doc.lines)) return false;
      out(direction);
      return true;
    },
  };
}

const stream = async (parser: Promise<StreamParser<unknown>>) =>
  new LanguageSupport(StreamLanguage.define(await parser));

const LANGUAGES: [RegExp, () => Promise<LanguageSupport>][] = [
  [/\.(py|pyi|pyw|ipy)$/, async () => (await import('@codemirror/lang-python')).python()],
  [/\.(js|mjs|cjs|jsx)$/, async () => (await import('@codemirror/lang-javascript')).javascript({ jsx: true })],
  [/\.(ts|mts|cts)$/, async () => (await import('@codemirror/lang-javascript')).javascript({ typescript: true })],
  [/\.tsx$/, async () => (await import('@codemirror/lang-javascript')).javascript({ jsx: true, typescript: true })],
  [/\.(json|ipynb|geojson|webmanifest)$/, async () => (await import('@codemirror/lang-json')).json()],
  [/\.(html?|xhtml|vue|svelte)$/, async () => (await import('@codemirror/lang-html')).html()],
  [/\.css$/, async () => (await import('@codemirror/lang-css')).css()],
  [/\.(md|markdown)$/, async () => (await import('@codemirror/lang-markdown')).markdown()],
  [/\.(sh|bash|zsh|ksh)$|(^|\/)\.(bashrc|profile|bash_profile|zshrc)$/, async () =>
    stream(import('@codemirror/legacy-modes/mode/shell').then((mode) => mode.shell))],
  [/\.toml$/, async () => stream(import('@codemirror/legacy-modes/mode/toml').then((mode) => mode.toml))],
  [/\.ya?ml$/, async () => stream(import('@codemirror/legacy-modes/mode/yaml').then((mode) => mode.yaml))],
  [/\.(ini|cfg|conf|properties|env)$/, async () =>
    stream(import('@codemirror/legacy-modes/mode/properties').then((mode) => mode.properties))],
  [/(^|\/)(Dockerfile|Containerfile)$|\.dockerfile$/, async () =>
    stream(import('@codemirror/legacy-modes/mode/dockerfile').then((mode) => mode.dockerFile))],
  [/\.(c|h)$/, async () => stream(import('@codemirror/legacy-modes/mode/clike').then((mode) => mode.c))],
  [/\.(cc|cpp|cxx|hpp|hh)$/, async () => stream(import('@codemirror/legacy-modes/mode/clike').then((mode) => mode.cpp))],
  [/\.java$/, async () => stream(import('@codemirror/legacy-modes/mode/clike').then((mode) => mode.java))],
  [/\.kts?$/, async () => stream(import('@codemirror/legacy-modes/mode/clike').then((mode) => mode.kotlin))],
  [/\.cs$/, async () => stream(import('@codemirror/legacy-modes/mode/clike').then((mode) => mode.csharp))],
  [/\.go$/, async () => stream(import('@codemirror/legacy-modes/mode/go').then((mode) => mode.go))],
  [/\.rs$/, async () => stream(import('@codemirror/legacy-modes/mode/rust').then((mode) => mode.rust))],
  [/\.rb$/, async () => stream(import('@codemirror/legacy-modes/mode/ruby').then((mode) => mode.ruby))],
  [/\.lua$/, async () => stream(import('@codemirror/legacy-modes/mode/lua').then((mode) => mode.lua))],
  [/\.(pl|pm)$/, async () => stream(import('@codemirror/legacy-modes/mode/perl').then((mode) => mode.perl))],
  [/\.r$/i, async () => stream(import('@codemirror/legacy-modes/mode/r').then((mode) => mode.r))],
  [/\.jl$/, async () => stream(import('@codemirror/legacy-modes/mode/julia').then((mode) => mode.julia))],
  [/\.swift$/, async () => stream(import('@codemirror/legacy-modes/mode/swift').then((mode) => mode.swift))],
  [/\.sql$/, async () => stream(import('@codemirror/legacy-modes/mode/sql').then((mode) => mode.standardSQL))],
  [/\.(xml|svg|xsd|xsl|plist)$/, async () => stream(import('@codemirror/legacy-modes/mode/xml').then((mode) => mode.xml))],
  [/\.(diff|patch)$/, async () => stream(import('@codemirror/legacy-modes/mode/diff').then((mode) => mode.diff))],
  [/(^|\/)CMakeLists\.txt$|\.cmake$/, async () => stream(import('@codemirror/legacy-modes/mode/cmake').then((mode) => mode.cmake))],
  [/\.(tex|sty|cls)$/, async () => stream(import('@codemirror/legacy-modes/mode/stex').then((mode) => mode.stex))],
];

async function languageOf(name: string): Promise<LanguageSupport | undefined> {
  return LANGUAGES.find(([pattern]) => pattern.test(name))?.[1]();
}
